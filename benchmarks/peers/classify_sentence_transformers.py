# What a user of sentence-transformers writes for the same table: a classifier on fixed vectors;
# the encoder itself is not trained.
import joblib
import pandas
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

train, dev = train_test_split(pandas.read_csv("reviews.csv"), test_size=0.1, random_state=0)
encoder = SentenceTransformer("model/discriminator")
classifier = LogisticRegression(max_iter=1000)
classifier.fit(encoder.encode(train["text"].tolist()), train["stars"])
print(classifier.score(encoder.encode(dev["text"].tolist()), dev["stars"]))
joblib.dump(classifier, "classifier.joblib")

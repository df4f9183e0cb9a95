"""ELECTRA: pre-train text encoders as discriminators, fine-tune them, study them."""

__version__ = "0.1.0"

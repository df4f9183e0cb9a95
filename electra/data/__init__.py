"""From raw text to rows of tokens on the disk.

In the order data flows: `text` and `sources` read documents, `check` says what is wrong with them,
`tokenizer` makes and applies WordPiece, `pieces` cuts examples, `cluster` spreads that over
processes or machines, `corpus` writes, and `shards` reads what was written.
"""

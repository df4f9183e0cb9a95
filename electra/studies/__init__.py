"""The paper's experiments, what they came to, and what a run will cost.

`ablate` runs the studies; `records` reads runs and studies, `figures` draws them, `report` and
`report_html` compare them with each other and with the paper; `plan` and `roofline` predict time,
memory and money.
"""

"""The paper's experiments, what they came to, and what a run will cost.

`ablate` runs the studies, `report` and `report_html` compare runs with each other and with the
paper, `plan` and `roofline` predict time, memory and money.
"""

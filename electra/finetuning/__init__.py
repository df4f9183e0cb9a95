"""From a pre-trained encoder to a task: the paper's section 3 and its appendix B.

`tasks` and `squad` read data, `features` makes rows of it, `heads` has the paper's heads,
`step` trains them, `finetune` does so over all seeds, `metrics` scores the answers, and `glue`
does it for every task.
"""

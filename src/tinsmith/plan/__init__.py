"""Where a base model fits: its memory per device, and over how many devices to split it, with the reasons.

`architecture` counts the numbers of the model that transformers builds from a config.json, without memory for weights.
`memory` converts them to bytes of one device, and `degrees` chooses or checks the degrees of parallelism. Loads no
weights, queries no device and knows no process. `tinsmith doctor MODEL` shows a plan; an engine checks its settings
against one before it loads.
"""

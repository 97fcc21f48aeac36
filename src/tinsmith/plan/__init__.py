"""Where a base model fits: what it takes of each device, and over how many devices to lay it, with the reasons.

`architecture` counts the numbers of the model that transformers builds from a config.json, without memory for weights.
`memory` turns them into bytes of one device, and `degrees` chooses or checks how to cut it. Nothing here loads a
weight, asks a device or knows a process. `tinsmith doctor MODEL` shows a plan; an engine compares its settings with one
before it loads.
"""

"""Where a base model fits: what it takes of each device, and over how many devices to lay it, with the reasons.

`architecture` counts the numbers of the model that transformers builds from a config.json, without memory for weights,
`memory` turns them into bytes of one device, `degrees`
chooses or checks how to cut it, `report` says it in words. All pure: nothing here loads a weight, asks a device or
knows a process. `tinsmith doctor MODEL` shows a plan; an engine holds its settings against one before it loads.
"""

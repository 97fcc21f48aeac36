"""Import and export of adapters and base models: PEFT directories, merged models, the hub's protocol."""

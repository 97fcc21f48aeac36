"""Adapters and base models from and to elsewhere: PEFT directories, merged models, the hub's protocol."""

"""The HTTP routes of the Tinker API, one file per noun. They use the stores, the wire format and admission."""

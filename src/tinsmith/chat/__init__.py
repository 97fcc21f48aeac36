"""Chats and completions, as OpenAI's and Anthropic's clients send them <-> sampling.

Pure translation. A request becomes a plan: prompts as token ids, sampling parameters, and the parts of the answer.
Sampled tokens become the answer's JSON, whole or in pieces. A field of a request is honoured or refused by name, never
ignored. Knows tokenizers and chat templates; no HTTP, no SQL, no device.
"""

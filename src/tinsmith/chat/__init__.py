"""Translates the chats and completions of OpenAI's and Anthropic's clients to and from sampling.

A request becomes a plan: prompts as token ids, sampling parameters, and the contents of the response. Sampled tokens
become the response's JSON, whole or in chunks. Fields that would change an answer are honoured or refused; others are
ignored by name. The package uses tokenizers and chat templates, and is free of HTTP, SQL and device code.
"""

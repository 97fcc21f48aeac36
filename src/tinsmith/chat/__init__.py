"""Other services' words for the same thing: chats and completions, as OpenAI's and Anthropic's clients send them.

Pure translation. A request's JSON becomes a plan (prompts as token ids, sampling parameters, what the answer is to
show); the tokens that were sampled become the answer's JSON, whole or in pieces as they come. What a request asks for
is honoured or refused by name, never passed over. Knows tokenizers and chat templates; no HTTP, no SQL, no device.
"""

"""The endpoints for OpenAI's and Anthropic's clients."""

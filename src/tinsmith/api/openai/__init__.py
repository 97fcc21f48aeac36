"""The endpoints of OpenAI's and Anthropic's clients."""

"""The router: one OpenAI-compatible front that sends both legs of a request at once."""

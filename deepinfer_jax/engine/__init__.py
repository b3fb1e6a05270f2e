"""From requests to results: scheduling, text, and the `LLM` class."""

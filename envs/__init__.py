"""What a task is and what it is worth. Speaks messages, never a token id, a model or a container API."""

"""Data: rows from files or tasks, prompts and demonstrations of token ids, and the order they are handed out in."""

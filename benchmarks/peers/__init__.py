"""Whole systems side by side: Kilburn and its peers, the same model, the same prompts, in turns. See `__main__`."""

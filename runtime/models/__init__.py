"""Models as the engine runs them, over blocks of keys and values."""

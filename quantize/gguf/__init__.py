"""GGUF: block codecs, names, tokenizer metadata, export and import."""

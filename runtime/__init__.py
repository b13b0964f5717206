"""The engine that serves checkpoints: `LLM(path).generate(prompts, SamplingParams(...))`."""

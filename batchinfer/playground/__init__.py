"""Try a model before there is a data set: `generate` answers a few prompts, `chat` holds a conversation."""

"""Bodies of chats and completions in OpenAI's form, which those of all other APIs become."""

"""Bodies of OpenAI's form, which other APIs share."""

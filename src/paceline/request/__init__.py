"""A request and what it asks for, the text's spans, and what is counted of a step."""

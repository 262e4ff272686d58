"""JSON schemas as data: where references lead, what is closed, which schemas exclude each other.

Schemas are callers' and may be malformed: what is not as it should be counts as not there. Knows no
compiler and no request.
"""

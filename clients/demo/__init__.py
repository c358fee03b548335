"""One long document, three questions: what a prefix cache is for."""

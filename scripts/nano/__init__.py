"""Data for a small trained checkpoint: public texts, a tokenizer, conversations, and a byte model to compare with."""

"""Commands that are no training: compare, summary, export, convert, translate, speed, benchmark."""

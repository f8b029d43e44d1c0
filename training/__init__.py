"""Fine-tune, compare and export: the application around the library in :mod:`gates`."""

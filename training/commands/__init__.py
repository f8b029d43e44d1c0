"""Commands that are no training: report, summary, export, convert, translate, latency."""

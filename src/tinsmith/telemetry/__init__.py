"""What operators see: logs, figures, spans, timelines, and counts of what is there. Changes nothing."""

"""From what a request asks of its answer's form to a grammar."""

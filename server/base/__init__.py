"""What all APIs share of a request: fields, content, key, memory; and its errors and stream."""

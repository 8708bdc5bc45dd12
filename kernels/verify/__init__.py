"""Drawing drafts, and deciding which of them stand."""

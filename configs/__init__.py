"""One file a draft/target pair, each runnable as it stands: `outrider serve --config NAME`."""

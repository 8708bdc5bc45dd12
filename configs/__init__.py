"""One file a draft/target pair, each ready to run: `outrider serve --config NAME`."""

"""The checks of `outrider doctor`."""

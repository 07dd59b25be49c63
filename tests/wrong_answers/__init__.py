"""Wrong answers to the exercises, a file for each chapter, named as its checks are."""

"""The checks of the exercises, a file for each chapter: NN_name.ipynb has its checks in name.py."""

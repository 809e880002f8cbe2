"""Models of other programs, read and written: Nematus in TensorFlow and Theano."""

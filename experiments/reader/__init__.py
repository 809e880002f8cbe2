"""The attentive reader on CNN and Daily Mail: the authors' model, its archives, and the experiment."""

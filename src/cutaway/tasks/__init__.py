"""What people do with encoders: vectors of texts, labels of texts and of parts of them, words for blanks."""

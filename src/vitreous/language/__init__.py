"""Images and words: which part of an image makes each word of an answer, and which words of a text fit an image."""

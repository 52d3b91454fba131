"""Models as graphs: files, questions asked of them, what may be done to them; passes/ changes them."""

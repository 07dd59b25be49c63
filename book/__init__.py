"""The book: the site made of what the repository holds. `make site` builds it; nothing imports from here."""

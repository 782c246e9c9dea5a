return name

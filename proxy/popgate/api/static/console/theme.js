// Sets the chosen colour theme before the first paint. Without a choice, the browser's setting applies.
const theme = localStorage.getItem("popgate.theme")
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme

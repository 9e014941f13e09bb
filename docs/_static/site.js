// A click on a picture opens it at its full size.
document.addEventListener("click", event => {
  if (event.target.matches("article img")) open(event.target.src);
});

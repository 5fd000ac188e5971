// The dashboard takes the scheme of the page around it. Opened from a file, it keeps the system's: browsers keep frames of files apart.
const frame = document.querySelector("iframe.dashboard");
if (frame) {
  const follow = () => {
    const inside = frame.contentDocument;
    if (!inside || !inside.getElementById("theme")) return;
    inside.documentElement.dataset.theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
    inside.getElementById("theme").hidden = true;
  };
  frame.addEventListener("load", follow);
  new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  follow();
}

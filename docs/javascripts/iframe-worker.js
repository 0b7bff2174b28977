// The theme searches in a worker, which browsers do not load from a file on disk. This runs the worker's script in a
// hidden frame instead. The theme's own stand-in for it would come from a server; it looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        frame.addEventListener("load", () => resolve(this.start(frame.contentWindow, url)), { once: true });
      });
      frame.srcdoc = "<!doctype html>";
      document.body.append(frame);
    }

    async start(scope, url) {
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.addEventListener("load", resolve);
          script.addEventListener("error", reject);
          script.src = source;
          scope.document.head.append(script);
        });
      scope.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      await load(url);
      return scope;
    }

    // Messages wait for the script, and arrive in the order in which they were sent.
    postMessage(data) {
      this.loaded.then((scope) => scope.dispatchEvent(new scope.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}

// Runs the worker of the site's search in a hidden frame, on pages opened from a disk, where Chromium refuses workers.
// The theme's `offline` plugin looks for a script of this name; its worker looks for `IFrameWorker` in the page above it.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = async (...urls) => {
        for (const each of urls) await this.run(each);
      };
      this.loaded = this.run(new URL(url, location));
    }

    run(url) {
      return new Promise((done, failed) => {
        const script = this.scope.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: failed });
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}

{
  description = "Kubernetes nodes in systemd-nspawn slots";

  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-unstable";

  outputs =
    { self, nixpkgs }:
    {
      packages = nixpkgs.lib.genAttrs [ "x86_64-linux" "aarch64-linux" ] (system: {
        default = nixpkgs.legacyPackages.${system}.callPackage ./package.nix {
          version = "0.0.0+0.g${self.shortRev or "unknown"}";
        };
      });
      nixosModules.default = import ./module.nix;
    };
}
